# Runs Keystone, Neutron and their tools out of the folder OSROOT, into which Debian's packages are unpacked.
import os
import site
import sys

# PYTHONPATH is not enough: some packages are namespaces, which *-nspkg.pth make.
site.addsitedir(os.environ['OSROOT'] + '/usr/lib/python3/dist-packages')
cmd, args = sys.argv[1], sys.argv[2:]

if cmd == 'manage':  # oslab.py manage --config-file CONF COMMAND ...
    sys.argv = ['keystone-manage'] + args
    from keystone.cmd.manage import main
    sys.exit(main())

if cmd == 'neutron-db':  # oslab.py neutron-db sqlite:////p/neutron.db
    # The migrations of alembic do not run on SQLite.
    import sqlalchemy as sa
    from neutron.db.migration.models import head  # noqa: F401
    from neutron_lib.db import model_base
    engine = sa.create_engine(args[0])
    model_base.BASEV2.metadata.create_all(engine)
    with engine.connect() as c:
        c.execute(sa.text('pragma journal_mode=wal'))

if cmd == 'keystone':  # oslab.py keystone CONF PORT
    os.environ['OS_KEYSTONE_CONFIG_DIR'], os.environ['OS_KEYSTONE_CONFIG_FILES'] = os.path.split(args[0])
    sys.argv = ['keystone']
    from keystone.server.wsgi import initialize_public_application
    app = initialize_public_application()
    import waitress
    # More threads give a 500 now and then: a connection of SQLite belongs to one.
    waitress.serve(app, host='127.0.0.1', port=int(args[1]), threads=1, _quiet=True, ident=None)

if cmd == 'neutron':  # oslab.py neutron CONF
    from sqlalchemy import pool
    from sqlalchemy.dialects.sqlite import pysqlite
    # The default connects anew for each transaction, which costs a third of the time.
    pysqlite.SQLiteDialect_pysqlite.get_pool_class = classmethod(lambda cls, url: pool.QueuePool)
    sys.argv = ['neutron-server', '--config-file', args[0]]
    from neutron.cmd.eventlet.server import main
    sys.exit(main())
